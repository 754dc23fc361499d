"""The card of a model whose norms were removed."""

from __future__ import annotations

from collections.abc import Sequence

from normsmith.report import Results, markdown_table
from normsmith.surgery import FoldReport


def model_card(results: Results, report: FoldReport, base: str, own_code: bool, notes: Sequence[str] = ()) -> str:
    """Markdown with the numbers, what was removed, and the command that repeats it.

    `own_code` says that the folder brings a modelling file; a model of normsmith's own class needs the package. `notes`
    are sentences on how the norms were removed.
    """
    loading = "trust_remote_code=True)  # runs modeling_normsmith.py beside it" if own_code else ")"
    imports = "" if own_code else "import normsmith.models  # makes the class known\n"
    kept = "\n".join(f"- `{name}`: {why}" for name, why in report.kept) or "- none"
    decode = "\n".join(
        f"| {r.label} | {r.median:.0f} | {r.low:.0f} – {r.high:.0f} | {r.ratio:.2f} |" for r in results.decode
    )
    remarks = "".join(f" {note}." for note in notes)
    described = "".join(f"\n- {arm.label}: {arm.description}." for arm in results.arms if arm.description) + "\n"
    settings = "\n".join(f"- {name}: {value}" for name, value in results.data.items())
    return f"""---
base_model: {base}
tags: [normsmith, norm-free]
---

# {results.title}

{results.summary}

{markdown_table(results)}
{described}
Largest relative difference that folding made to the outputs: {report.error or 0.0:.1e}.

| Decoding with a KV cache | tokens/s | quartiles | ratio |
|---|---:|---:|---:|
{decode}

## Loading

```python
{imports}from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("PATH"{", " if own_code else ""}{loading}
```

## What was done

Removed: {len(report.removed)} norms.{remarks} Kept:

{kept}

Data:

{settings}

```
{results.command}
```
"""
