"""The dialect of vLLM beyond OpenAI's: pooling, scores and rankings, the server itself, LoRA adapters."""

from penstock.api.dialects.vllm import adapters, pooling, scoring, server
from penstock.api.routes import VariantTable

ROUTES = (*pooling.ROUTES, *scoring.ROUTES, *server.ROUTES, *adapters.ROUTES)
VARIANTS: VariantTable = pooling.VARIANTS
