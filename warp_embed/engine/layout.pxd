"""Where everything lies: shapes from the configuration, memory from one arena, weights from their names."""
from warp_embed._store cimport Trunk
from warp_embed.engine.structs cimport Config, LayerState, Linear, Scratch, StateParts, Weights


cdef int fill_config(Config *c, config, size_t context, size_t chunk, size_t threads, str kv) except -1
cdef size_t carve_scratch(const Config *c, Scratch *s, Linear *linear, char *base) noexcept
cdef size_t carve_weights(const Config *c, Weights *w, config, Trunk trunk, str prefix, char *base) except? 0
cdef size_t carve_state(const Config *c, config, StateParts *s, char *base) except? 0
cdef int reserve_blocks(const Config *c, const Weights *w, LayerState *layers, size_t position,
                        size_t positions) except -1 nogil
cdef void share_blocks(const Config *c, LayerState *to, const LayerState *source, size_t positions) noexcept nogil
cdef void free_blocks(LayerState *layers, size_t n_layers) noexcept nogil
