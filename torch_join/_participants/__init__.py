"""Every mechanism is a participant: what an active rank announces and how a joined rank mirrors it.

One mechanism a file; none knows the loop that it takes part in but by the protocol `Driver` in `participant.py`.

Begin with: `participant.py`, then `ddp_model.py`. `_torch/` makes them usable in torch's own `Join`.
"""

from torch_join._participants._metrics.module_metrics import ModuleMetrics
from torch_join._participants._torch.public import JoinableMetric, JoinableModel, JoinableOptimizer, JoinableState
from torch_join._participants.participant import Participant

__all__ = ["JoinableMetric", "JoinableModel", "JoinableOptimizer", "JoinableState", "ModuleMetrics", "Participant"]
