# One line per op, in alphabetical order: csrc/binding/NAME.cpp always, csrc/cpu/NAME.cpp with CPU,
# csrc/cuda/NAME.cu with CUDA. Nothing is globbed, so a forgotten file is an error. FUSED lets the
# compiler contract a product and a sum in the CPU file, where bits need not be the same everywhere.

list(APPEND BINDINGS csrc/shm/group.cpp csrc/shm/segment.cpp)

ds_op(adam CPU CUDA)
ds_op(bias_activation CPU CUDA)
ds_op(block_sparse_attention CPU CUDA FUSED)
ds_op(elementary CPU CUDA)
ds_op(evoformer_attention CPU CUDA FUSED)
ds_op(gated_activation CPU CUDA)
ds_op(grouped_matmul CPU CUDA FUSED)
ds_op(kv_cache CPU CUDA)
ds_op(layer_norm CPU CUDA)
ds_op(moe_routing CPU CUDA)
ds_op(paged_attention CPU CUDA FUSED)
ds_op(quantize CPU CUDA)
ds_op(ragged_gather CPU CUDA)
ds_op(random_ltd CPU CUDA)
ds_op(rms_norm CPU CUDA)
ds_op(rotary CPU CUDA)
ds_op(shm CPU)
