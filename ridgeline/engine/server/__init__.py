"""An OpenAI-compatible server over an EngineClient: app.build_app(...), run.serve(...)."""
