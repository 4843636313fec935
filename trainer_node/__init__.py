"""The trainer's side of the bus: three lines in a training loop.

from trainer_node import AdapterPublisher

with AdapterPublisher.blocking(adapter="policy", bind="tcp://127.0.0.1:5870") as publisher:
    update = publisher.publish(model)
"""

from trainer_node.export import ExportedAdapter, export_adapter
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
