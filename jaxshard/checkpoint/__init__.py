"""Checkpoints that fit any strategy, mesh and number of devices, and report corrupt data."""

from jaxshard.checkpoint.as_bytes import from_bytes as from_bytes
from jaxshard.checkpoint.as_bytes import to_bytes as to_bytes
from jaxshard.checkpoint.checkpointer import Checkpointer as Checkpointer
from jaxshard.checkpoint.restoring import read as read
from jaxshard.checkpoint.retention import Best as Best
from jaxshard.checkpoint.storage.errors import CorruptCheckpointError as CorruptCheckpointError
from jaxshard.checkpoint.storage.errors import NewerFormatError as NewerFormatError
from jaxshard.checkpoint.storage.leaves import ArrayEntry as ArrayEntry
from jaxshard.checkpoint.storage.leaves import NumberEntry as NumberEntry
from jaxshard.checkpoint.storage.manifest import CheckpointInfo as CheckpointInfo
