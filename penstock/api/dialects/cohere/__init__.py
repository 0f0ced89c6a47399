"""The dialect of Cohere, versions 1 and 2."""

from penstock.api.dialects.cohere import chat, embed, text
from penstock.api.routes import VariantTable

ROUTES = (*embed.ROUTES, *text.ROUTES, *chat.ROUTES)
VARIANTS: VariantTable = embed.VARIANTS
