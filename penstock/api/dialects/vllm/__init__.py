"""The dialect of vLLM beyond OpenAI's: pooling, scores and rankings, the server itself."""

from penstock.api.dialects.vllm import pooling, scoring, server
from penstock.api.routes import VariantTable

ROUTES = (*pooling.ROUTES, *scoring.ROUTES, *server.ROUTES)
VARIANTS: VariantTable = pooling.VARIANTS
