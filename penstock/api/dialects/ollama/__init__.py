"""The dialect of Ollama."""

from penstock.api.dialects.ollama import embed, text

ROUTES = (*embed.ROUTES, *text.ROUTES)
