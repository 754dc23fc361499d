"""torch's encoder layers have a fused form that reads weight, bias and eps of their norms, whatever stands there."""

from __future__ import annotations

from torch import nn

# Attributes that torch looks at before it fuses a layer, or packs a padded batch for a stack of fused layers.
_SWITCHES: dict[type[nn.Module], str] = {
    nn.TransformerEncoderLayer: "activation_relu_or_gelu",
    nn.TransformerEncoder: "use_nested_tensor",
}
_SAVED = "_normsmith_fused"


def update_fused_forms(model: nn.Module) -> None:
    """Switch the fused form off where a layer's norms are no plain LayerNorms, and back on where they are again."""
    for module in model.modules():
        for cls, switch in _SWITCHES.items():
            if not isinstance(module, cls) or not hasattr(module, switch):
                continue
            layers = [m for m in module.modules() if isinstance(m, nn.TransformerEncoderLayer)]
            plain = all(type(norm) is nn.LayerNorm for layer in layers for norm in (layer.norm1, layer.norm2))
            if not plain and _SAVED not in module.__dict__:
                setattr(module, _SAVED, getattr(module, switch))
                setattr(module, switch, False)
            elif plain and _SAVED in module.__dict__:
                setattr(module, switch, module.__dict__.pop(_SAVED))
