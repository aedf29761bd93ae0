"""What a run trains on: prompts and their rewards, on the device or on the host."""

from train.tasks.base import DeviceTask, HostTask, Prompts, Rewards
from train.tasks.chain_sum import ChainSum
from train.tasks.sorting import SortDigits

__all__ = ["ChainSum", "DeviceTask", "HostTask", "Prompts", "Rewards", "SortDigits"]
