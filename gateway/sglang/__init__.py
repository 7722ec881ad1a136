"""SGLang's endpoints: samples, control of the fleet as one engine, adapters and weights."""
