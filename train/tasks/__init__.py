"""What a run trains on: prompts and their rewards, on the device or on the host."""

from train.data import Cursor
from train.tasks.arithmetic import Arithmetic
from train.tasks.base import DeviceTask, HostTask, Prompts, Rewards, Scored
from train.tasks.countdown import Countdown
from train.tasks.make import device_task, text_task
from train.tasks.sorting import SortDigits
from train.tasks.text import TextTask

__all__ = [
    "Arithmetic",
    "Countdown",
    "Cursor",
    "DeviceTask",
    "HostTask",
    "Prompts",
    "Rewards",
    "Scored",
    "SortDigits",
    "TextTask",
    "device_task",
    "text_task",
]
