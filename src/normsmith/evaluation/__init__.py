"""What a trained model is worth."""

from normsmith.evaluation.perplexity import language_loss

__all__ = ["language_loss"]
