import pytest
from contract import GROUPED, MULTI_HEAD


@pytest.fixture(params=[MULTI_HEAD, GROUPED], ids=str)
def kind(request):
    """Each of our attention layers."""
    return request.param
