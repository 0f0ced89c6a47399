"""The dialect of OpenAI: embeddings and the list of models, completions, chat, files and batches."""

from penstock.api.dialects.openai import batches, chat, completions, embeddings, files
from penstock.api.dialects.openai.batches import batch_endpoints

__all__ = ["ROUTES", "batch_endpoints"]
ROUTES = (*embeddings.ROUTES, *completions.ROUTES, *chat.ROUTES, *files.ROUTES, *batches.ROUTES)
