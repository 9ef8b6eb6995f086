"""Kernels run on a GPU where there is one, else in Triton's interpreter, which has to be chosen before they load."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
