"""A pytest plugin that simulates a CUDA device: `pytest -p tests.simulated_gpu.plugin`.

With `PENSTOCK_SIMULATED_KERNELS=0` the torch references run instead of the kernels, which is faster. Steps
are small, because the interpreter of kernels is slow.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

from penstock import config
from penstock.kernels import language
from penstock.runner import mixed, warmup
from tests.kernels import fast_interpreter, interpreter_repairs
from tests.simulated_gpu import cuda

STEP_TOKENS = 256

interpreter_repairs.install()
fast_interpreter.install()
cuda.install()
if os.environ.get("PENSTOCK_SIMULATED_KERNELS") == "0":
    language.set_kernel_devices()
config.cuda_step_tokens = lambda *_: STEP_TOKENS
mixed.warm_up_keys = lambda max_rows: []  # graphs are captured when steps need them
warmup.KERNEL_LENGTHS = (1, 17)
warmup.TIMED_SHAPES = ((1, 16), (2, 16))
