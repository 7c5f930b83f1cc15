"""A model as values and nodes: recorded by ``models``, fused, and lowered to a tape of the core.

``values`` what a node is · ``builder`` the operations that models call · ``fuse`` nodes that one kernel does
in one go · ``lower`` nodes to tape records.
"""

from pykvstream.graph.builder import GraphBuilder
from pykvstream.graph.lower import delta_layers, lower
from pykvstream.graph.values import DeltaSpec, FrontSpec, Graph, Node, Value, WeightSource

__all__ = ["DeltaSpec", "FrontSpec", "Graph", "GraphBuilder", "Node", "Value", "WeightSource", "delta_layers", "lower"]
