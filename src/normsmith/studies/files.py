"""Names of the files in a study's folder and in each run's."""

PLAN = "study.json"
CHECKED = ".recipes.json"
RECIPE, ENVIRONMENT, METRICS, RESULT, FAILURE = (
    "recipe.yaml",
    "environment.json",
    "metrics.jsonl",
    "result.json",
    "failure.json",
)
DIAGNOSTICS, PUBLISHED, DECODE, ROBUSTNESS = "diagnostics.json", "published.json", "decode.json", "robustness.json"
