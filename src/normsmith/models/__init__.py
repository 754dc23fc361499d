"""The reference transformer; importing this package registers it with transformers' Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from normsmith.models.config import PRESETS, ModelConfig, NormsmithConfig, preset_config
from normsmith.models.language import NormsmithForCausalLM, NormsmithModel, NormsmithPreTrainedModel

AutoConfig.register("normsmith", NormsmithConfig)
AutoModel.register(NormsmithConfig, NormsmithModel)
AutoModelForCausalLM.register(NormsmithConfig, NormsmithForCausalLM)

__all__ = [
    "PRESETS",
    "ModelConfig",
    "NormsmithConfig",
    "NormsmithForCausalLM",
    "NormsmithModel",
    "NormsmithPreTrainedModel",
    "preset_config",
]
