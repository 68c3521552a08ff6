from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> str:
    """Folder of a tiny random policy with its tokenizer."""
    from tiny import save_model

    return save_model(tmp_path_factory.mktemp("tiny"))
