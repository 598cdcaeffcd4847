"""Every op that a compiled program calls by name. Importing this registers them."""

from m3compile.attention.fp8 import FP8_ATTENTION_SCHEMA
from m3compile.attention.op import ATTENTION_SCHEMA
from m3compile.kernels.fp8 import FP8_PRODUCT_SCHEMA, FP8_SUMS_SCHEMA
from m3compile.kernels.product import PRODUCT_SCHEMA, SPLIT_SCHEMA

# Stored in every manifest: a program calls the ops by these schemas, so a loader whose schemas
# differ must not run it.
OP_SCHEMA = "; ".join(
    (
        ATTENTION_SCHEMA,
        PRODUCT_SCHEMA,
        SPLIT_SCHEMA,
        FP8_ATTENTION_SCHEMA,
        FP8_PRODUCT_SCHEMA,
        FP8_SUMS_SCHEMA,
    )
)
