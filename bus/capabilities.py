"""Whether a node can serve a layout: pure, so that controller and node refuse alike, before a byte moves."""

from __future__ import annotations

from bus.errors import Refused
from bus.events import NodeCapabilities, Reason
from bus.manifest import AdapterLayout


def check_servable(layout: AdapterLayout, capabilities: NodeCapabilities) -> None:
    """Raise `Refused`, with the numbers, if a node with these capabilities cannot serve the layout."""
    ours, theirs = capabilities.base_model, layout.base_model
    if not ours.matches(theirs):
        raise Refused(
            Reason.WRONG_BASE_MODEL,
            f"the adapter was trained on {theirs.name} ({theirs.fingerprint}), "
            f"the node serves {ours.name} ({ours.fingerprint})",
        )
    if layout.rank > capabilities.max_rank:
        raise Refused(
            Reason.RANK_TOO_HIGH,
            f"the adapter has rank {layout.rank}, the node serves at most {capabilities.max_rank}; "
            f"start it with --max-lora-rank {layout.rank} or train with a lower rank",
        )
    strangers = sorted({module.rpartition(".")[2] for module in layout.modules} - set(capabilities.modules))
    if strangers:
        raise Refused(
            Reason.UNKNOWN_MODULES,
            f"the node's model takes no LoRA on {', '.join(strangers[:5])}; it knows {', '.join(capabilities.modules)}",
        )
