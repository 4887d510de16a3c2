"""The Triton kernels on a GPU, op by op against the reference. ``pytest -m gpu``.

The tests are those that CI runs through the interpreter (``twins.py`` and its like), here compiled and
in bfloat16 too.
"""

from __future__ import annotations

import pytest
import torch

if torch.cuda.is_available():
    from tests.kernels.triton.dense.twins_compact import *  # noqa: F403
    from tests.kernels.triton.draft_twins import *  # noqa: F403
    from tests.kernels.triton.filter_twins import *  # noqa: F403
    from tests.kernels.triton.lora.twins_lora import *  # noqa: F403
    from tests.kernels.triton.page_twins import *  # noqa: F403
    from tests.kernels.triton.step_twins import *  # noqa: F403
    from tests.kernels.triton.twins import *  # noqa: F403
    from tests.kernels.triton.twins_draft import *  # noqa: F403
    from tests.kernels.triton.twins_e4m3 import *  # noqa: F403
    from tests.kernels.triton.twins_experts import *  # noqa: F403
    from tests.kernels.triton.twins_large import *  # noqa: F403

pytestmark = pytest.mark.gpu
