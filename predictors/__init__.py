"""Draft-side predictors: what is trained, calibrated, saved and served to the decoder.

A folder `predictors` elsewhere on PYTHONPATH may add modules; a predictor lies in one of them."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
