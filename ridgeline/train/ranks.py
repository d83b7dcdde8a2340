"""The processes of a run: one, or many under torchrun that decide, fail and stop together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from ridgeline.core import env
from ridgeline.core.errors import UserError, bad_value, common
from ridgeline.parallel import mesh
from ridgeline.train.config import TrainConfig, config_hash

Result = TypeVar("Result")
