"""What AutoNorm's gates cost in inference, and that nothing of it is left once they have collapsed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from normsmith.bench.timing import Timing, interleave, seconds_of
from normsmith.errors import UnknownNameError
from normsmith.models import NormsmithForCausalLM, preset_config
from normsmith.norms.autonorm import AutoNorm
from normsmith.surgery import collapse_

_VOCABULARY = 4096


def bench_collapse(
    norm: str = "layernorm",
    width: int = 128,
    layers: int = 6,
    batch: int = 8,
    length: int = 64,
    rounds: int = 41,
) -> dict[str, Timing]:
    """Seconds of a forward pass in eager mode: a plain model, another like it, with gates, and collapsed.

    The second plain model shows what the comparison can see.

    Args:
        norm: the candidate of AutoNorm that all gates choose, of which the plain models are made.
        width: of the model, with one head for each 64 channels.
        layers: blocks.
        batch: sequences.
        length: tokens of each.
        rounds: measured rounds.

    Raises:
        UnknownNameError: `norm` is no candidate.
    """
    gated, chosen = _model("autonorm", width, layers), _model("autonorm", width, layers)
    candidates = next(module.names for module in chosen.modules() if isinstance(module, AutoNorm))
    if norm not in candidates:
        raise UnknownNameError("candidate", norm, candidates)
    ids = torch.randint(_VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0))
    _decide(chosen, candidates.index(norm))
    collapse_(chosen, {"input_ids": ids})
    plain = _model(norm, width, layers)
    plain.load_state_dict(chosen.state_dict())
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, chosen(ids).logits), "a number for models that disagree would say nothing"
    models = {"plain": plain, "plain again": _model(norm, width, layers), "gates": gated, "collapsed": chosen}
    return interleave({name: _case(model, ids) for name, model in models.items()}, rounds, warmup=3)


def _model(norm: str, width: int, layers: int) -> NormsmithForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": max(1, width // 64)}
    config = preset_config("llama", vocab_size=_VOCABULARY, **sizes, norm=norm, embedding_scale=False)
    return NormsmithForCausalLM(config).eval()


@torch.no_grad()
def _decide(model: nn.Module, place: int) -> None:
    for module in model.modules():
        if isinstance(module, AutoNorm):
            module.selector_out.zero_()
            module.selector_out_shift.fill_(-9.0)[place] = 9.0


def _case(model: NormsmithForCausalLM, ids: torch.Tensor) -> Callable[[], float]:
    def work() -> None:
        with torch.no_grad():
            model(ids)

    return lambda: seconds_of(work)
