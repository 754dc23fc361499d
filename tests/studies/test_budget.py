"""What a run would cost: parameters as built, arithmetic as counted by torch, memory that grows with what it holds."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from normsmith.errors import InputError
from normsmith.studies.budget import Machine, budget, check_memory, check_study_memory
from normsmith.studies.recipe import Recipe
from normsmith.studies.runner import build_model
from normsmith.studies.tasks import known_facts


def recipe(**changes: object) -> Recipe:
    base = {
        "data": {"vocab_size": 300, "sequence_length": 32},
        "model": {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4},
        "training": {"max_steps": 7, "batch_size": 2, "gradient_accumulation": 3},
    }
    return Recipe(**{**base, **changes})


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_and_arithmetic_are_those_of_the_built_model(tied: bool) -> None:
    made = recipe(model={**recipe().model.to_dict(), "tie_word_embeddings": tied})
    found = budget(made)
    model = build_model(made, known_facts(made))
    model.set_attn_implementation("eager")  # the counter does not see into fused attention
    assert found.parameters == model.num_parameters()
    assert found.tokens == 7 * 2 * 3 * 32
    ids = torch.zeros(2, 32, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    # The counter counts matrix products, and the scores of all pairs, forward and backward; so does the formula.
    per_token = counter.get_total_flops() / ids.numel()
    assert found.flops / found.tokens == pytest.approx(per_token, rel=0.03)


def test_hours_are_arithmetic_over_what_the_machine_does() -> None:
    machine = Machine("slow", peak=1e9, utilisation=0.5)
    alone, shared = budget(recipe(), 1, machine), budget(recipe(), 4, machine)
    assert alone.hours == pytest.approx(alone.flops / 0.5e9 / 3600)
    assert shared.tokens == 4 * alone.tokens
    assert shared.hours == pytest.approx(4 * alone.hours)
    assert shared.memory == alone.memory


def test_memory_has_its_three_parts() -> None:
    first = budget(recipe())
    more = budget(recipe(training={**recipe().training.to_dict(), "batch_size": 4}))
    fixed = 16 * first.parameters
    assert more.memory - fixed == pytest.approx(2 * (first.memory - fixed))
    assert first.memory - fixed == 2 * 32 * (3 * 48 * 68 + 10 * 300)
    half = budget(recipe(training={**recipe().training.to_dict(), "bf16": True}))
    lean = budget(recipe(training={**recipe().training.to_dict(), "activation_checkpointing": True}))
    assert lean.memory < half.memory < first.memory


def test_the_published_sizes_of_tapernorm_are_met() -> None:
    sizes = {64: 1.03, 128: 2.85, 256: 8.85, 512: 30.29}
    for width, millions in sizes.items():
        made = recipe(
            data={"vocab_size": 10000, "sequence_length": 512},
            model={"hidden_size": width, "num_hidden_layers": 8, "num_attention_heads": 16},
        )
        assert budget(made).parameters / 1e6 == pytest.approx(millions, abs=0.006)


def test_other_tasks_count_their_positions() -> None:
    images = Recipe(data={"kind": "images"}, model={"patch_size": 2, "hidden_size": 48}, training={"max_steps": 1})
    assert budget(images).tokens == images.training.batch_size * (16 + 1)
    table = Recipe(data={"kind": "table", "source": "diabetes"}, model={"hidden_size": 48}, training={"max_steps": 1})
    assert budget(table).tokens == table.training.batch_size * (10 + 1)


def test_a_run_that_does_not_fit_is_refused_before_it_starts() -> None:
    needed = budget(recipe()).memory
    check_memory(recipe(), needed)
    with pytest.raises(InputError, match=r"'run' needs about .* GB .* there are .* lower training.batch_size"):
        check_memory(recipe(), needed - 1)
    with pytest.raises(InputError, match=r"weights and what AdamW keeps .* lower model.hidden_size"):
        check_memory(recipe(), 16.0 * budget(recipe()).parameters - 1)
    huge = recipe(training={"batch_size": 10**7})
    with pytest.raises(InputError, match="GB to train"):
        check_memory(huge)
    swept = {"training.batch_size": ("4", str(10**7))}
    with pytest.raises(InputError, match="'layernorm' needs about .* lower training.batch_size"):
        check_study_memory(recipe(), ["layernorm"], swept)
