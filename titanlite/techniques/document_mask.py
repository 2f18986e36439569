"""Attention within documents. Data marks them and models keep them apart, which `models/trial.py` checks."""

from typing import TYPE_CHECKING

from titanlite.schema import Config
from titanlite.techniques.technique import Technique, reads

if TYPE_CHECKING:
    from titanlite.models.base import Model
    from titanlite.models.registry import ModelSpec


class DocumentMask(Technique):
    option = "data.document_mask"

    def is_used(self, config: Config) -> bool:
        return config.data.document_mask

    @reads(option)
    def check_model(self, config: Config, spec: "ModelSpec", model: "Model", world_size: int) -> None:
        from titanlite.models.trial import check_documents, check_documents_apart

        check_documents(model)
        if config.model.file:
            check_documents_apart(spec)

    def summary(self, config: Config) -> str:
        return "attention within documents"


TECHNIQUE = DocumentMask()
