"""Rerun, tweak and teach A-3PO (arXiv 2512.06547) and OPPO (arXiv 2509.25762): RL for language models that does not wait."""

__version__ = "0.6.0"
