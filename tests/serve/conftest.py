"""The checkpoint of the runtime's tests."""

from tests.runtime.conftest import checkpoint as checkpoint  # a fixture
