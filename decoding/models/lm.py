"""See `decoding.interfaces`."""

from decoding.interfaces import LM as LM
from decoding.interfaces import LMOutput as LMOutput
from decoding.interfaces import Pair as Pair
from decoding.interfaces import RowsWanted as RowsWanted
from decoding.interfaces import Wanted as Wanted
