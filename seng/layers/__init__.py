"""Module kinds and their per-sample gradients; `factors`, `columns` and `arrange` are for kinds and
layouts of your own.
"""

from seng.layers.kinds import arrange, columns, factors, kind_of, positions

__all__ = ["arrange", "columns", "factors", "kind_of", "positions"]
