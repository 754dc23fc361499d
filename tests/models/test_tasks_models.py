"""Heads on the trunk: what they compute, what padding changes, what they refuse, and what transformers loads again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import normsmith.models as M
from normsmith.errors import InputError
from normsmith.models.branch import Branch
from normsmith.models.classify import Standardise, pool
from normsmith.norms import Norm
from normsmith.surgery import find_norms, fold_, swap_norms_, taper_
from normsmith.surgery.example import make_example
from tests.conftest import scramble

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "norm": "layernorm",
    "mlp": "gelu",
    "use_bias": True,
    "initializer_range": 0.2,
}
TOKENS = {"vocab_size": 50, "causal": False, "id2label": {0: "a", 1: "b", 2: "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
IDS = torch.randint(1, 50, (3, 9), generator=torch.Generator().manual_seed(0))


def vision(**changes: Any) -> M.NormsmithForImageClassification:
    options = {**SIZES, "image_size": [8, 12], "patch_size": 4, "num_channels": 3, "id2label": TOKENS["id2label"]}
    config = M.NormsmithVisionConfig(**{**options, "label2id": TOKENS["label2id"], **changes})
    return scrambled(M.NormsmithForImageClassification(config))


def sentences(**changes: Any) -> M.NormsmithForSequenceClassification:
    return scrambled(M.NormsmithForSequenceClassification(M.NormsmithConfig(**{**SIZES, **TOKENS, **changes})))


def tagging(**changes: Any) -> M.NormsmithForTokenClassification:
    return scrambled(M.NormsmithForTokenClassification(M.NormsmithConfig(**{**SIZES, **TOKENS, **changes})))


def table(**changes: Any) -> M.NormsmithForTableRegression:
    config = M.NormsmithTableConfig(**{**SIZES, "num_features": 5, "num_targets": 2, **changes})
    model = scrambled(M.NormsmithForTableRegression(config))
    model.standardise.set_([1.0, 2, 3, 4, 5], [1.0, 2, 3, 0, 5])
    model.target.set_([100.0, -5], [20.0, 2])
    return model


def scrambled(model: Any) -> Any:
    scramble(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


INPUTS: dict[Any, dict[str, torch.Tensor]] = {
    vision: {"pixel_values": torch.rand(3, 3, 8, 12, generator=torch.Generator().manual_seed(1))},
    sentences: {"input_ids": IDS},
    tagging: {"input_ids": IDS},
    table: {"features": torch.randn(3, 5, generator=torch.Generator().manual_seed(2))},
}
AUTO = {
    vision: transformers.AutoModelForImageClassification,
    sentences: transformers.AutoModelForSequenceClassification,
    tagging: transformers.AutoModelForTokenClassification,
    table: transformers.AutoModel,
}


@pytest.mark.parametrize("make", list(INPUTS), ids=lambda m: m.__name__)
@pytest.mark.parametrize("connection", ["pre", "sphere"])
def test_transformers_saves_and_loads_them_to_the_bit(make: Any, connection: str, tmp_path: Path) -> None:
    model = make(connection=connection, layer_scale=0.3)
    model.save_pretrained(tmp_path)
    again = AUTO[make].from_pretrained(tmp_path)
    assert type(again) is type(model)
    assert torch.equal(again(**INPUTS[make]).logits, model(**INPUTS[make]).logits)
    assert again.config.id2label == model.config.id2label


def test_an_image_is_cut_into_patches_row_by_row_behind_the_class_token() -> None:
    model = vision(pooling="mean")
    x = INPUTS[vision]["pixel_values"]
    model.standardise.set_([0.1, 0.2, 0.3], [0.5, 0.25, 2.0])
    scaled = (x - torch.tensor([0.1, 0.2, 0.3])[:, None, None]) / torch.tensor([0.5, 0.25, 2.0])[:, None, None]
    rows: list[torch.Tensor] = [model.class_token.value.expand(3, -1)]
    for top in (0, 4):
        for left in (0, 4, 8):
            patch = scaled[:, :, top : top + 4, left : left + 4].flatten(1)
            rows.append(patch @ model.patches.weight.flatten(1).T + model.patches.bias)
    h = model.model(inputs_embeds=torch.stack(rows, 1)).last_hidden_state
    expected = model.classifier(h.mean(1))
    torch.testing.assert_close(model(x).logits, expected, rtol=1e-4, atol=1e-5)
    model.config.pooling = "cls"
    torch.testing.assert_close(model(x).logits, model.classifier(h[:, 0]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [sentences, tagging])
@pytest.mark.parametrize("norm", ["layernorm", "dyt"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_changes_nothing(make: Any, norm: str, attention: str) -> None:
    model = make(norm=norm, attn_implementation=attention)
    lengths = (9, 5, 1)
    mask = torch.tensor([[1] * n + [0] * (9 - n) for n in lengths])
    padded = model(IDS.masked_fill(mask == 0, 7), attention_mask=mask).logits
    for row, length in enumerate(lengths):
        alone = model(IDS[row : row + 1, :length]).logits[0]
        theirs = padded[row] if make is sentences else padded[row, :length]
        torch.testing.assert_close(theirs, alone, rtol=1e-4, atol=1e-5)


def test_every_token_sees_the_later_ones_unless_the_model_is_causal() -> None:
    changed = IDS.clone()
    changed[:, -1] = changed[:, -1] % 49 + 1
    for causal in (False, True):
        model = tagging(causal=causal)
        same = torch.equal(model(IDS).logits[:, :-1], model(changed).logits[:, :-1])
        assert same == causal


def test_norms_that_pool_over_tokens_learn_which_are_valid() -> None:
    class Pooled(Norm):
        token_mask: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.ones_like(x[..., 0]) if self.token_mask is None else self.token_mask.to(x)
            return x - (x * mask[..., None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None]

    model = sentences()
    for block in model.model.layers:
        block.attention_connection.norm = Pooled(32, model.config.norm_spec)
    mask = torch.tensor([[1] * n + [0] * (9 - n) for n in (9, 4, 2)])
    padded = model(IDS, attention_mask=mask).logits
    torch.testing.assert_close(padded[2], model(IDS[2:, :2]).logits[0], rtol=1e-4, atol=1e-5)
    assert model.model.layers[0].attention_connection.norm.token_mask is None  # of the last call, which had none


def test_losses_are_those_of_the_formulas() -> None:
    labels = torch.tensor([2, 0, 1])
    logits = sentences()(IDS).logits
    soft = 0.9 * F.one_hot(labels, 3).float() + 0.1 / 3
    torch.testing.assert_close(sentences_loss(labels), F.cross_entropy(logits, labels), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        sentences_loss(soft), F.cross_entropy(logits, labels, label_smoothing=0.1), rtol=1e-5, atol=1e-6
    )
    tags = torch.randint(3, (3, 9)).masked_fill(torch.rand(3, 9) < 0.4, -100)
    model = tagging()
    out = model(IDS, labels=tags)
    each = -out.logits.log_softmax(-1).gather(-1, tags.clamp_min(0)[..., None])[..., 0][tags != -100]
    torch.testing.assert_close(out.loss, each.mean())
    torch.testing.assert_close(model(IDS, labels=tags, num_items_in_batch=7).loss, each.sum() / 7)


def sentences_loss(labels: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    model = sentences()
    torch.manual_seed(0)
    return model(IDS, labels=labels).loss


def test_a_table_goes_in_and_comes_out_in_its_own_units() -> None:
    model = table()
    x, y = INPUTS[table]["features"], torch.tensor([[90.0, -4], [130.0, -6], [100.0, -5]])
    scaled = (x - torch.tensor([1.0, 2, 3, 4, 5])) / torch.tensor([1.0, 2, 3, 1, 5])
    tokens = scaled[..., None] * model.tokens.weights + model.tokens.biases
    first = model.class_token.value.expand(3, 1, -1)
    h = model.model(inputs_embeds=torch.cat((first, tokens), 1)).last_hidden_state[:, 0]
    raw = model.regressor(h)
    out = model(x, labels=y)
    torch.testing.assert_close(out.logits, raw * torch.tensor([20.0, 2]) + torch.tensor([100.0, -5]))
    torch.testing.assert_close(
        out.loss, ((raw - (y - torch.tensor([100.0, -5])) / torch.tensor([20.0, 2])) ** 2).mean()
    )
    torch.testing.assert_close(Standardise.invert(model.target, model.target(y)), y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_units_that_half_precision_does_not_hold(dtype: torch.dtype, tmp_path: Path) -> None:
    model = table()
    model.standardise.set_([1.0, 2e5, 3, 4, 5], [1.0, 1e5, 3, 4, 5])
    model.target.set_([206855.0, 0.0], [1e5, 1.0])
    x = INPUTS[table]["features"] * torch.tensor([1, 1e5, 1, 1, 1])
    exact = model(x).logits
    model.save_pretrained(tmp_path)
    for half in (copy.deepcopy(model).to(dtype), M.NormsmithForTableRegression.from_pretrained(tmp_path, dtype=dtype)):
        assert half.regressor.weight.dtype == dtype
        assert torch.equal(half.target.mean, model.target.mean)
        off = (half(x).logits - exact).abs().amax(0)
        assert off[0] < 3e3, off
        assert off[1] < 3e-2, off


def test_an_example_is_made_in_the_units_of_the_training_data() -> None:
    model = table()
    model.standardise.set_([1e4, 2, 3, 4, 5], [10.0, 2, 3, 0, 5])
    assert (make_example(model)["features"][:, 0] - 1e4).abs().max() < 100
    images = vision()
    images.standardise.set_([0.5, 0.5, 0.5], [0.01, 0.01, 0.01])
    assert (make_example(images)["pixel_values"] - 0.5).abs().max() < 0.1


def test_branch_against_its_formula_and_in_the_mean() -> None:
    branch = Branch(4, 0.5, 0.0, 0.25)
    with torch.no_grad():
        branch.gamma.copy_(torch.tensor([1.0, -2, 3, 0.5]))
    out = torch.randn(20000, 2, 4)
    torch.testing.assert_close(branch.eval()(out), out * branch.gamma)
    trained = branch.train()(out)
    kept = trained.abs().sum((1, 2)) > 0
    assert abs(kept.float().mean() - 0.75) < 0.02
    torch.testing.assert_close(trained[kept], (out * branch.gamma / 0.75)[kept])
    rates = [
        block.mlp_branch.drop_path for block in vision(num_hidden_layers=3, drop_path=0.2, dropout=0.1).model.layers
    ]
    assert rates == pytest.approx([0.0, 0.1, 0.2])
    assert all(block.mlp_branch is None for block in vision().model.layers)


@pytest.mark.parametrize("make", [sentences, tagging])
def test_a_row_of_padding_alone_is_named(make: Any) -> None:
    model, mask = make(), torch.ones(IDS.shape, dtype=torch.long)
    mask[1] = 0
    with pytest.raises(InputError, match="row 1 of the batch is padding alone"):
        model(IDS, attention_mask=mask)
    mask[1, 0] = 1
    model(IDS, attention_mask=mask)
    model(IDS, attention_mask=torch.zeros(IDS.shape[0], 1, 1, IDS.shape[1]))  # scores, which zeros leave alone


def test_pooling_of_nothing_but_padding_is_finite() -> None:
    assert torch.equal(pool(torch.randn(2, 3, 4), torch.zeros(2, 3), "mean"), torch.zeros(2, 4))


def test_labels_of_a_table_are_never_broadcast() -> None:
    x, y = INPUTS[table]["features"], torch.tensor([1.0, 5.0, -3.0])
    model = M.NormsmithForTableRegression(M.NormsmithTableConfig(num_features=5, hidden_size=16, num_hidden_layers=1))
    expected = (model(x).logits[:, 0] - y).square().mean()
    for labels in (y, y[:, None]):
        torch.testing.assert_close(model(x, labels=labels).loss, expected)
    for wrong in (y.repeat(2), y[:, None].expand(3, 2), y[:1]):
        with pytest.raises(InputError, match=r"the labels are \[.*\], the predictions \[3, 1\]"):
            model(x, labels=wrong)
    with pytest.raises(InputError, match=r"the labels are \[3, 1\], the predictions \[3, 2\]"):
        table()(x, labels=y[:, None])


@pytest.mark.parametrize("make", list(INPUTS), ids=lambda m: m.__name__)
def test_surgery_knows_them(make: Any) -> None:
    model = make()
    before = model(**INPUTS[make]).logits
    # A table's predictions are put into its units after the head, which hides neither head nor final norm.
    assert [site.role for site in find_norms(model)].count("pre") == 4
    controller = taper_(model, {"warmup": 0.5, "scale_loss": 0.0}, steps=2)
    torch.testing.assert_close(model(**INPUTS[make]).logits, before, rtol=1e-4, atol=1e-4)
    for _ in range(2):
        model.train()(**INPUTS[make])
        controller.step()
    after = model.eval()(**INPUTS[make]).logits
    fold_(model)
    assert not any(isinstance(m, Norm) and m is not model.model.norm for m in model.modules())
    torch.testing.assert_close(model(**INPUTS[make]).logits, after, rtol=1e-3, atol=1e-3)
    swap_norms_(make(), "dyt", where="pre")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: vision(patch_size=3), "patch_size=3 does not divide images of 8×12 pixels; write one of 1, 2, 4"),
        (lambda: vision()(torch.rand(2, 1, 8, 12)), r"have the shape \[1, 8, 12\].*this model takes \[3, 8, 12\]"),
        (lambda: vision()(torch.rand(2, 3, 8, 8)), r"have the shape \[3, 8, 8\]"),
        (lambda: table()(torch.rand(2, 4)), "the rows have 4 features, this model takes 5"),
        (lambda: table(num_features=0), "num_features must be at least 1"),
        (lambda: sentences(dropout=1.0), "dropout=1.0 is no probability below 1"),
        (lambda: sentences(pooling="max"), "unknown pooling 'max'"),
        (lambda: tagging(positions="sinus"), "unknown positions 'sinus'"),
    ],
)
def test_what_cannot_be(wrong: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        wrong()


def test_gradients_reach_every_parameter() -> None:
    labels = {
        vision: torch.tensor([0, 1, 2]),
        sentences: torch.tensor([0, 1, 2]),
        tagging: IDS % 3,
        table: torch.randn(3, 2),
    }
    for make, inputs in INPUTS.items():
        model: nn.Module = make(layer_scale=0.5).train()
        model(**inputs, labels=labels[make]).loss.backward()
        missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()]
        # A softmax is blind to a shift of all its keys, so k's bias has none.
        assert [name for name in missing if not name.endswith("k_proj.bias")] == []


@pytest.mark.parametrize("make", [vision, sentences, tagging, table])
def test_a_head_may_be_of_any_length_where_all_other_matrices_are_of_one(make: Callable[..., Any]) -> None:
    """The stream of nGPT has length 1, so that unit rows could say no more than ±1: no class would ever be sure."""
    model = make(connection="ngpt")
    head = next(m for name, m in model.named_modules() if name in ("classifier", "regressor"))
    with torch.no_grad():
        head.weight.mul_(50)
    before = head.weight.detach().clone()
    model.normalize_weights_()
    assert torch.equal(head.weight, before)
    assert all(
        torch.allclose(m.weight.norm(dim=0 if m.role in ("o", "down") else 1), torch.ones(()), atol=1e-5)
        for m in model.modules()
        if isinstance(m, nn.Linear) and m is not head
    )
