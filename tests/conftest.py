"""Small tensors only: a second thread costs more than it gives, above all on a busy machine."""

import torch

torch.set_num_threads(1)
