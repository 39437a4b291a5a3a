"""Datasets: `load` reads one that is on disk, `seng data NAME` gets it there, `stream` decodes folders too large to hold.

`augment` works on the device. Where each dataset comes from is in docs/data.md.
"""

from seng.lab.datasets.folders import stream
from seng.lab.datasets.registry import NAMES
from seng.lab.datasets.store import get, load
from seng.lab.datasets.values import Arrays, Data, DataError

__all__ = ["NAMES", "Arrays", "Data", "DataError", "get", "load", "stream"]
