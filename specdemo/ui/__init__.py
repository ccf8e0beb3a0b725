"""Web page of specdemo: layout, event handlers, API and tabs. Only this package imports Gradio."""
