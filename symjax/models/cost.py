"""What a model costs, by formula: parameters and floating-point operations."""

from symjax import attention, config


def forward_flops(options: config.Model, parameters: int) -> float:
    """Operations of the forward pass a token, a multiply-add counted as two.

    2 for each weight that multiplies a token, plus the work of attention at the
    model's length. The compiler's own count is of no use here: it counts the body of
    a scan once.
    """
    tables = options.vocabulary * options.width * (not options.tie_embeddings)
    if options.positions == "learned":
        tables += options.length * options.width
    return 2 * (parameters - tables) + options.depth * attention_flops(options)


def attention_flops(options: config.Model) -> float:
    """Operations of one layer's attention a token, its projections left out."""
    chosen = options.attention
    branches = 2 if chosen.differential == "v1" else 1
    queries = options.heads * branches
    size = options.head_size or options.width // queries
    value = size * branches
    form = attention.MECHANISMS[chosen.mechanism]
    if form.row_weights is not None:  # half the pairs of a causal map
        return options.length * (queries * size + options.heads * value)
    if "projection" in form.options():
        features, drawing = chosen.feature_count, 4 * chosen.feature_count * size
    else:
        features, drawing = size, 0
    inside = min(chosen.chunk_size, options.length) * (features + value)
    return queries * (drawing + inside + 4 * features * value)


def train_flops(options: config.Model, parameters: int) -> float:
    """Operations of a training step a token: the backward pass costs two forwards."""
    return 3 * forward_flops(options, parameters)
