"""Signature files: one YAML file a known failure. Data only; see ``ddtree_ops.diagnose.library``."""
