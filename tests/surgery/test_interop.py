"""What users do around a change of norms: subclasses, wrappers, hooks, the Hub, other outputs and calls than usual."""

from __future__ import annotations

import copy
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import normsmith as ns
from normsmith.errors import InputError
from normsmith.models import NormsmithForCausalLM, preset_config
from normsmith.surgery.load import load_model
from tests.tiny import output, same_state, state, tiny

X = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))
CHANGES = {
    "swap": lambda m, x: ns.swap_norms_(m, "dyt", example=x),
    "taper": lambda m, x: ns.taper_(m, {"scale_loss": 0.0}, example=x, steps=20),
    "one by one": lambda m, x: ns.remove_one_by_one_(m, {"scale_loss": 0.0}, example=x),
}


class Net(nn.Module):
    """Two pre-norm layers; what is special about them is in the subclasses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def sublayer(self, i: int, h: Tensor) -> Tensor:
        return self.layers[i](self.norms[i](h))

    def forward(self, x: Tensor) -> Any:
        h = x
        for i in range(2):
            h = h + self.sublayer(i, h)
        return self.head(h)


class Capped(transformers.LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        found.logits = 3 * torch.tanh(found.logits / 3)
        return found


def test_a_subclass_with_code_of_its_own_is_not_saved_as_what_it_is_not(tmp_path: Path) -> None:
    model = Capped(tiny("llama").config)
    ns.swap_norms_(model, "dyt")  # the example is made for what the class within takes
    with pytest.raises(InputError, match="Capped has its own forward, which the native format cannot describe"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    plain = type("Renamed", (transformers.LlamaForCausalLM,), {})(tiny("llama").config)
    ns.swap_norms_(plain, "dyt")
    plain.save_pretrained(tmp_path)
    again = load_model(tmp_path, trust_remote_code=True)
    ns.swap_norms_(again, "rmsnorm", where="final")
    again.save_pretrained(tmp_path / "again")
    torch.testing.assert_close(output(load_model(tmp_path / "again", trust_remote_code=True)), output(again))


def test_the_finished_folder_is_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads: list[tuple[str, dict[str, Any], set[str]]] = []

    def upload(model: Any, repo: str, **options: Any) -> None:
        model.save_pretrained(tmp_path / "sent")  # as transformers does
        uploads.append((repo, options, {path.name for path in (tmp_path / "sent").iterdir()}))

    monkeypatch.setattr(transformers.PreTrainedModel, "push_to_hub", upload)
    model = tiny("llama")
    ns.swap_norms_(model, "dyt")
    model.save_pretrained(tmp_path / "mine", push_to_hub=True, repo_id="me/mine", private=True)
    (repo, options, files), written = uploads[0], {path.name for path in (tmp_path / "mine").iterdir()}
    assert (len(uploads), repo, options) == (1, "me/mine", {"private": True})
    assert files == written >= {"modeling_normsmith.py", "config.json"}


def test_saving_as_accelerate_does(tmp_path: Path) -> None:
    model = tiny("llama")
    ns.swap_norms_(model, "dyt")
    model.save_pretrained(tmp_path / "other", is_main_process=False)
    assert not list((tmp_path / "other").glob("*.json"))
    model.save_pretrained(tmp_path / "main", True, model.state_dict())
    torch.testing.assert_close(output(load_model(tmp_path / "main", trust_remote_code=True)), output(model))


@pytest.fixture
def one_rank() -> Generator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("how", list(CHANGES))
@pytest.mark.usefixtures("one_rank")
def test_a_wrapper_that_knows_its_parameters_is_refused(how: str) -> None:
    model = Net()
    wrapped = DistributedDataParallel(model)
    before = state(model)
    for given in (model, wrapped):
        with pytest.raises(InputError, match="inside a DistributedDataParallel, .*wrap the model then"):
            CHANGES[how](given, X)
    assert same_state(model, before)


@dataclass
class Found:
    y: Tensor
    hidden: Tensor


class Records(Net):
    def forward(self, x: Tensor) -> Any:
        first = self.norms[0](x)
        h = x + self.layers[0](first)
        return Found(self.head(h + self.sublayer(1, h)), first)


def test_what_a_dataclass_returns_is_seen() -> None:
    model = Records()
    with torch.no_grad():
        model.norms[0].weight.uniform_(0.5, 2)
    sites = ns.find_norms(model, X)
    assert sites[0].blocked == "the model returns it"
    before = model(X).hidden
    assert ns.swap_norms_(model, "dyt", example=X).swapped
    ns.restore_(model)
    assert torch.equal(model(X).hidden, before)


class Silent(Net):
    def forward(self, x: Tensor) -> Any:
        return str(super().forward(x).shape)


def test_a_model_that_returns_no_numbers_cannot_be_verified() -> None:
    with pytest.raises(InputError, match=r"Silent does not run .*returns no floating-point tensor \(str\)"):
        ns.taper_(Silent(), {"scale_loss": 0.0}, example=X, steps=20)


def test_what_makes_a_weight_is_no_norm() -> None:
    model = Net()
    spectral_norm(model.layers[0])
    weight_norm(model.layers[1])
    assert [site.name for site in ns.find_norms(model, X)] == ["norms.0", "norms.1"]


@pytest.mark.parametrize("how", list(CHANGES))
def test_hooks_of_a_norm_go_on(how: str) -> None:
    model, seen = Net(), list[torch.Size]()
    handle = model.norms[0].register_forward_hook(lambda m, args, out: seen.append(out.shape))
    CHANGES[how](model, X)
    seen.clear()
    model(X)
    assert seen == [X.shape]
    handle.remove()
    model(X)
    assert seen == [X.shape]


class Reading(Net):
    """Reads the dtype of a norm's weight, as Mamba does."""

    def sublayer(self, i: int, h: Tensor) -> Tensor:
        norm = self.norms[i]
        return self.layers[i](norm(h.to(norm.weight.dtype)))


class Gated(Net):
    """A norm that is called with a gate, as in Mamba2."""

    class Norm(nn.LayerNorm):
        def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
            return super().forward(x if gate is None else x * F.silu(gate))

    def __init__(self) -> None:
        super().__init__()
        self.norms[1] = self.Norm(16)

    def sublayer(self, i: int, h: Tensor) -> Tensor:
        return self.layers[i](self.norms[i](h, h) if i else self.norms[i](h))


@pytest.mark.parametrize("how", list(CHANGES))
@pytest.mark.parametrize("cls", [Reading, Gated])
def test_a_norm_that_is_used_in_a_way_of_its_own_leaves_the_model_as_it_was(cls: type[Net], how: str) -> None:
    model = cls()
    before, modules = state(model), dict(model.named_modules())
    if cls is Gated and how == "swap":
        report = CHANGES[how](model, X)
        assert [name for name, *_ in report.swapped] == ["norms.0"]
        return
    with pytest.raises(InputError, match=f"{cls.__name__} does not run with .* nothing was changed"):
        CHANGES[how](model, X)
    assert same_state(model, before)
    assert dict(model.named_modules()) == modules
    model(X)


def test_mamba_reads_the_weight_of_its_norms() -> None:
    config = transformers.MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, state_size=4)
    model = transformers.MambaForCausalLM(config).eval()
    before = model(torch.arange(6)[None]).logits
    with pytest.raises(InputError, match="MambaForCausalLM does not run with .*has no attribute 'weight'"):
        ns.swap_norms_(model, "layernorm")
    assert torch.equal(model(torch.arange(6)[None]).logits, before)


class Stepped(Net):
    """Makes float32 numbers itself, as a timestep embedding: its float64 copy does not run."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.head(torch.linspace(0, 1, 16))


def test_a_model_without_a_float64_copy_is_verified_in_its_own_dtype() -> None:
    model = Stepped()
    with torch.no_grad():
        for norm in model.norms:
            norm.weight.uniform_(0.5, 2)
    before = model(X)
    report = ns.fold_(model, mode="affine", example=X)
    assert report.error is not None
    torch.testing.assert_close(model(X), before, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(norm.weight, torch.ones(16)) for norm in model.norms if hasattr(norm, "weight"))


def test_frozen_queries_are_not_rewritten() -> None:
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = NormsmithForCausalLM(preset_config("llama", **sizes)).train()
    frozen = {name: p for name, p in model.named_parameters() if "self_attn" in name}
    for parameter in frozen.values():
        parameter.requires_grad_(False)
    before = {name: p.clone() for name, p in frozen.items()}
    config = ns.SequentialConfig(start_step=1, gaps=(1, 1, 1), waits=(1, 1))
    controller = ns.remove_one_by_one_(model, config, steps=20)
    assert all("is frozen" in why for why in controller.reasons.values())
    assert len(controller.reasons) == 2
    ids = torch.arange(8)[None]
    for _ in range(20):
        model(input_ids=ids, labels=ids)
        controller.step()
    assert all(torch.equal(p, before[name]) for name, p in frozen.items())


def test_the_example_that_was_given_is_the_one_that_is_used() -> None:
    class Bare(nn.Module):
        """A model of token ids without a config to make an example from."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = copy.deepcopy(tiny("llama"))

        def forward(self, input_ids: Tensor) -> Any:
            return self.inner(input_ids=input_ids, use_cache=False).logits

    model, ids = Bare(), torch.arange(12).view(2, 6)
    controller = ns.remove_one_by_one_(model, {"scale_loss": 0.0}, example={"input_ids": ids})
    assert len(controller.splits) == 2


class Adapted(nn.Module):
    """A linear layer with adapters by name, as PEFT holds them."""

    def __init__(self, ranks: dict[str, int]) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16)
        self.down = nn.ModuleDict({name: nn.Linear(16, rank, bias=False) for name, rank in ranks.items()})
        self.up = nn.ModuleDict({name: nn.Linear(rank, 16, bias=False) for name, rank in ranks.items()})
        self.active = next(iter(ranks))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up[self.active](self.down[self.active](x))


@pytest.mark.parametrize(("other", "folds"), [(4, True), (2, False)])
def test_an_adapter_that_sleeps_is_folded_too_or_keeps_the_norm(other: int, folds: bool) -> None:
    model = Net().requires_grad_(False)
    model.layers[0] = Adapted({"one": 4, "two": other}).requires_grad_(False)
    with torch.no_grad():
        model.norms[0].weight.uniform_(0.5, 2)
    expected: dict[str, Tensor] = {}
    for name in ("two", "one"):
        model.layers[0].active = name
        expected[name] = model(X)
    report = ns.fold_(model, mode="affine", example=X)
    for name, before in expected.items():
        model.layers[0].active = name
        torch.testing.assert_close(model(X), before, rtol=1e-4, atol=1e-5)
    assert ("norms.0" in report.absorbed) == folds


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # what peft asks for
def test_adapters_are_saved_with_a_word_about_the_norms(tmp_path: Path) -> None:
    adapted: Any = peft.get_peft_model(tiny("llama"), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    ns.swap_norms_(adapted, "dyt")
    with pytest.warns(UserWarning, match="adapters alone are saved.*merge_and_unload"):
        adapted.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_config.json").is_file()
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    again = load_model(tmp_path / "merged", trust_remote_code=True)
    torch.testing.assert_close(output(again), output(merged))
