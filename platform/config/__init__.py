"""The configuration: one YAML file, one strict and frozen tree, one section a file.

Everything a user may write stands here with its description; vLLM's own options pass through
under vLLM's own names in ``models[].engine``. ``load`` is the only way in, and its errors name the
field and the line of the file.
"""

from loomserve.platform.config.adapters import Adapters, AdapterSource
from loomserve.platform.config.aliases import Alias, check_alias
from loomserve.platform.config.base import (
    Bytes,
    FieldError,
    check_model_name,
    parse_bytes,
    plain_name,
)
from loomserve.platform.config.batch import Batch, OfflineModel
from loomserve.platform.config.batching import Batching
from loomserve.platform.config.cluster import Cluster
from loomserve.platform.config.devices import LOCAL_NODE, Device
from loomserve.platform.config.elastic import Elastic, Idle
from loomserve.platform.config.keys import ApiKey
from loomserve.platform.config.kvstore import KvStore
from loomserve.platform.config.lending import Lending
from loomserve.platform.config.lengths import Lengths
from loomserve.platform.config.loader import load, load_keys, parse
from loomserve.platform.config.model import Model
from loomserve.platform.config.model_fields import LOCAL_PROMPT_TOKENS, Pipeline, Roles
from loomserve.platform.config.rebalancing import Rebalancing
from loomserve.platform.config.root import Config
from loomserve.platform.config.router import Router
from loomserve.platform.config.scaling import Scaling
from loomserve.platform.config.scheduling import Scheduling
from loomserve.platform.config.server import LogFormat, Server, Tls
from loomserve.platform.config.simulated import SIMULATED, Fault, Simulated
from loomserve.platform.config.tracing import Tracing
