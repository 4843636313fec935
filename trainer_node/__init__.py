"""The trainer's side of the bus: three lines in a training loop.

from trainer_node import AdapterPublisher

with AdapterPublisher.blocking(adapter="policy", bind="tcp://127.0.0.1:5870") as publisher:
    update = publisher.publish(model)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from trainer_node.export import export_adapter
    from trainer_node.exported import ExportedAdapter
    from trainer_node.publisher import AdapterPublisher, BlockingAdapterPublisher, PublisherSettings
    from trainer_node.session import Update

__all__ = [
    "AdapterPublisher",
    "BlockingAdapterPublisher",
    "ExportedAdapter",
    "PublisherSettings",
    "Update",
    "export_adapter",
]

_HOMES: Final = {
    "AdapterPublisher": "publisher",
    "BlockingAdapterPublisher": "publisher",
    "PublisherSettings": "publisher",
    "ExportedAdapter": "exported",
    "export_adapter": "export",
    "Update": "session",
}


def __getattr__(name: str) -> Any:
    """Import torch and PEFT when something needs them: a command that only reads headers answers in a second."""
    if name in _HOMES:
        return getattr(import_module(f"trainer_node.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
