"""What a trained model is worth."""

from normsmith.evaluation.harness import Plan, check_model, evaluate, plan_evaluation
from normsmith.evaluation.metrics import ACCURACY, RMSE, TaskMetric, TaskScore, predict, score
from normsmith.evaluation.perplexity import language_loss
from normsmith.evaluation.results import Evaluation, Score, check_result_path, read_evaluation
from normsmith.evaluation.suites import Metric, Suite, suites

__all__ = [
    "ACCURACY",
    "RMSE",
    "Evaluation",
    "Metric",
    "Plan",
    "Score",
    "Suite",
    "TaskMetric",
    "TaskScore",
    "check_model",
    "check_result_path",
    "evaluate",
    "language_loss",
    "plan_evaluation",
    "predict",
    "read_evaluation",
    "score",
    "suites",
]
