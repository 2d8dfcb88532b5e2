"""The checks of ``ddtree-ops validate``."""
