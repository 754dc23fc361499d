"""The reference transformer; importing this package registers it with transformers' Auto classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from normsmith.models.classify import (
    NormsmithForImageClassification,
    NormsmithForSequenceClassification,
    NormsmithVisionConfig,
)
from normsmith.models.config import PRESETS, ModelConfig, NormsmithConfig, preset_config
from normsmith.models.language import NormsmithForCausalLM, NormsmithModel, NormsmithPreTrainedModel
from normsmith.models.regress import NormsmithForTableRegression, NormsmithTableConfig
from normsmith.models.tagging import NormsmithForTokenClassification

AutoConfig.register("normsmith", NormsmithConfig)
AutoModel.register(NormsmithConfig, NormsmithModel)
AutoModelForCausalLM.register(NormsmithConfig, NormsmithForCausalLM)
AutoModelForSequenceClassification.register(NormsmithConfig, NormsmithForSequenceClassification)
AutoModelForTokenClassification.register(NormsmithConfig, NormsmithForTokenClassification)
AutoConfig.register("normsmith_vision", NormsmithVisionConfig)
AutoModelForImageClassification.register(NormsmithVisionConfig, NormsmithForImageClassification)
# transformers has no Auto class for tables.
AutoConfig.register("normsmith_table", NormsmithTableConfig)
AutoModel.register(NormsmithTableConfig, NormsmithForTableRegression)

__all__ = [
    "PRESETS",
    "ModelConfig",
    "NormsmithConfig",
    "NormsmithForCausalLM",
    "NormsmithForImageClassification",
    "NormsmithForSequenceClassification",
    "NormsmithForTableRegression",
    "NormsmithForTokenClassification",
    "NormsmithModel",
    "NormsmithPreTrainedModel",
    "NormsmithTableConfig",
    "NormsmithVisionConfig",
    "preset_config",
]
