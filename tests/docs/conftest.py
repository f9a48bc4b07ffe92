"""What docs show is what users see: small units are merged, as they are by default."""

import pytest
from helpers.merging import USERS, merging


@pytest.fixture(autouse=True)
def merged():
    with merging(USERS):
        yield
