"""A Ray cluster on this machine, whose nodes a test adds and kills."""

# pyright: basic, reportMissingImports=false

from ray.cluster_utils import Cluster

from tests.adapters.ray.orders import Orders

NODE = {"num_cpus": 4, "num_gpus": 2, "resources": {"slot": 2}}


def main() -> None:
    """Three nodes: the head, where programs run, and two for workers."""
    orders = Orders()
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    nodes = [cluster.add_node(**NODE) for _ in range(2)]
    cluster.wait_for_nodes()
    orders.answer(ready=True)
    while True:
        order = orders.next()
        match order["do"]:
            case "address":
                orders.answer(address=cluster.address)
            case "kill":
                # As a machine that loses its power: the node has no time for anything.
                [node] = [each for each in nodes if each.node_id == order["node"]]
                nodes.remove(node)
                cluster.remove_node(node, allow_graceful=False)
                orders.answer()
            case "add":
                nodes.append(cluster.add_node(**NODE))
                orders.answer(node=nodes[-1].node_id)
            case "stop":
                cluster.shutdown()
                orders.answer()
                return


if __name__ == "__main__":
    main()
