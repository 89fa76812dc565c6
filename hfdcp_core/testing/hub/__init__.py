"""A Hugging Face Hub on loopback, for tests, the demo and users' own tests only: it protects nothing."""

from hfdcp_core.testing.hub.journal import EVER, Call, Fault
from hfdcp_core.testing.hub.server import Hub
from hfdcp_core.testing.hub.state import Settings
from hfdcp_core.testing.hub.values import HubFile

__all__ = ["EVER", "Call", "Fault", "Hub", "HubFile", "Settings"]
