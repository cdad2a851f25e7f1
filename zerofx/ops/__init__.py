"""The ops that passes insert: each is declared once, with everything that the compiler queries.

An op is an `OpSpec` (zerofx/ir/spec.py): its schema and shape rule, the functions that graphs and
emitted code call, its name, lane and price, its effect on memory, and its rule in the proof. Each
file contains one family of ops. They import codegen and the planner, whose types their rules use,
and are imported by the passes that insert them. Code that only inspects nodes imports
`zerofx.ir.spec`.

`dtype` marks a change of number format: a gather casts the shard before it is sent, packing casts
gradients into their buffer's format, and storing casts the reduced slice to the format of the
shard. It is omitted if nothing changes. The engine takes the formats from the layout.
"""

from zerofx.ops.blocks import all_gather_blocks as all_gather_blocks
from zerofx.ops.blocks import reduce_scatter_blocks as reduce_scatter_blocks
from zerofx.ops.buffers import sync_buffers as sync_buffers
from zerofx.ops.capacity import expert_slots as expert_slots
from zerofx.ops.capacity import rows_from_slots as rows_from_slots
from zerofx.ops.capacity import rows_to_slots as rows_to_slots
from zerofx.ops.experts import grouped_rows as grouped_rows
from zerofx.ops.experts import grouped_rows_backward as grouped_rows_backward
from zerofx.ops.experts import grouped_weights as grouped_weights
from zerofx.ops.gathers import all_gather as all_gather
from zerofx.ops.gathers import param_view as param_view
from zerofx.ops.gathers import refresh as refresh
from zerofx.ops.gathers import release as release
from zerofx.ops.gathers import resident as resident
from zerofx.ops.gradients import all_reduce as all_reduce
from zerofx.ops.gradients import all_reduce_rows as all_reduce_rows
from zerofx.ops.gradients import grad_buffer as grad_buffer
from zerofx.ops.gradients import pack as pack
from zerofx.ops.gradients import reduce_scatter as reduce_scatter
from zerofx.ops.gradients import reduce_scatter_rows as reduce_scatter_rows
from zerofx.ops.gradients import store_grad as store_grad
from zerofx.ops.gradients import update as update
from zerofx.ops.handed import hand_over as hand_over
from zerofx.ops.nodes import all_gather_by_node as all_gather_by_node
from zerofx.ops.nodes import reduce_scatter_by_node as reduce_scatter_by_node
from zerofx.ops.pauses import pause as pause
from zerofx.ops.placed import embedding_rows as embedding_rows
from zerofx.ops.placed import embedding_rows_backward as embedding_rows_backward
from zerofx.ops.placed import gather_values as gather_values
from zerofx.ops.placed import joined_value as joined_value
from zerofx.ops.placed import padded as padded
from zerofx.ops.placed import part as part
from zerofx.ops.placed import reduce_joined as reduce_joined
from zerofx.ops.placed import reduce_values as reduce_values
from zerofx.ops.placed import scatter_values as scatter_values
from zerofx.ops.placed import summand as summand
from zerofx.ops.placed import swap_values as swap_values
from zerofx.ops.ring import attention as attention
from zerofx.ops.ring import attention_backward as attention_backward
from zerofx.ops.ring import ring_attention as ring_attention
from zerofx.ops.ring import ring_attention_backward as ring_attention_backward
from zerofx.ops.secondary import gather_secondary as gather_secondary
from zerofx.ops.secondary import secondary_shard as secondary_shard
from zerofx.ops.shards import offload_grad as offload_grad
from zerofx.ops.shards import read_shard as read_shard
from zerofx.ops.shards import refresh_shard as refresh_shard
from zerofx.ops.shards import reload_shard as reload_shard
from zerofx.ops.slots import free_slot as free_slot
from zerofx.ops.values import offload as offload
from zerofx.ops.values import read_back as read_back
from zerofx.ops.values import reload as reload
from zerofx.ops.values import write_out as write_out
from zerofx.ops.waits import wait as wait
