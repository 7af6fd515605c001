"""Ray Serve as the platform has it, with replicas that do nothing: ``PORT REPLICAS``."""

import sys
from http.server import HTTPServer, SimpleHTTPRequestHandler

from loomserve.deployments.ray_start import join
from loomserve.platform.nodes.lone_ray import LoneRay
from loomserve.platform.run.folder import RunFolder
from loomserve.platform.run.ray_environment import set_environment


class Nothing:
    """A deployment."""


if __name__ == "__main__":
    set_environment(run := RunFolder.create())
    join(LoneRay(run).start({}, lambda: None))
    # Ray reads its environment when it is imported.
    from ray import serve

    serve.start(proxy_location="Disabled")
    empty = serve.deployment(Nothing, num_replicas=int(sys.argv[2]))
    serve.run(empty.options(ray_actor_options={"num_cpus": 0}).bind(), route_prefix=None)
    # For who waits until it is up.
    HTTPServer(("127.0.0.1", int(sys.argv[1])), SimpleHTTPRequestHandler).serve_forever()
