"""The dialect of OpenAI: embeddings and the list of models, completions, chat."""

from penstock.api.dialects.openai import chat, completions, embeddings

ROUTES = (*embeddings.ROUTES, *completions.ROUTES, *chat.ROUTES)
