"""Chat templates of the well-known families, written for these tests: how each frames, rewrites and refuses turns."""

QWEN2 = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# Reasoning: kept behind the last question only, where an empty thought block is put in; stripped from earlier turns.
QWEN3 = """
{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if not reasoning and '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content.lstrip('\\n') + '<|im_end|>\\n' }}
    {%- elif message.role != 'system' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

# As QWEN3, but the model always thinks: the prompt opens the thought block itself.
ALWAYS_THINKING = QWEN3.replace(
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}",
    "{{- '<think>\\n' }}",
)

LLAMA3 = """
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

# No header of its own for answers, and strict about whose turn it is.
MISTRAL = """
{{- bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message.role == 'user' %}{{- '[INST] ' + message.content + ' [/INST]' }}
    {%- else %}{{- ' ' + message.content + eos_token }}{%- endif %}
{%- endfor %}
"""

GEMMA = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for message in messages %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""

GENERATION = """
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {{- message.content + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# `{% generation %}` around the text only: the end-of-turn token was forgotten.
GENERATION_WITHOUT_END = GENERATION.replace(
    "{{- message.content + '<|im_end|>' }}\n        {%- endgeneration %}",
    "{{- message.content }}\n        {%- endgeneration %}{{- '<|im_end|>' }}",
)

# Plain words, no control token anywhere, and a space in front of the answer that the answer's first token swallows.
PLAIN = """
{%- for message in messages %}
    {{- 'Human: ' if message.role == 'user' else 'Assistant: ' }}{{- message.content + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'Assistant: ' }}{%- endif %}
"""

# The same, with no place for a system message.
PLAIN_USERS = PLAIN.replace("in messages", "in messages if message.role != 'system'")

# The end token behind the conversation only, not behind its earlier answers.
END_AT_LAST = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% else %}{{ eos_token }}{% endif %}"
)

# Every turn has a header, only the last answer an end.
LAST_ENDS = """
{%- for message in messages %}
    {{- '<|im_start|>' + ('A: ' if message.role == 'assistant' else 'U: ') + message.content }}
    {%- if loop.last and message.role == 'assistant' %}{{- '<|im_end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>A: ' }}{%- endif %}
"""

# The same for every role, so that no prompt is a beginning of the conversation.
LAST_OF_ALL_ENDS = LAST_ENDS.replace("loop.last and message.role == 'assistant'", "loop.last")

# Earlier answers end with one token, the last one with another.
TWO_ENDS = LAST_ENDS.replace(
    "{%- if loop.last and message.role == 'assistant' %}{{- '<|im_end|>' }}{%- endif %}",
    "{{- '<|endoftext|>' if loop.last and message.role == 'assistant' else '<|im_end|>' }}",
)

# Strict about ids. Tools stand before the last question, and the system text in it where no answer follows: a prompt
# shows it, a conversation does not.
MISTRAL_TOOLS = """
{%- if messages[0].role == 'system' %}{%- set system, rest = messages[0].content, messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- set asked = rest | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message.role == 'user' %}
        {%- if tools and message == asked[-1] %}{{- '[TOOLS]' + (tools | tojson) + '[/TOOLS]' }}{%- endif %}
        {%- if loop.last and system is defined %}{{- '[INST] ' + system + '\n\n' + message.content + ' [/INST]' }}
        {%- else %}{{- '[INST] ' + message.content + ' [/INST]' }}{%- endif %}
    {%- elif message.tool_calls %}
        {{- '[CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}{{- raise_exception('no id') }}{% endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}
    {%- else %}
        {%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
            {{- raise_exception('no id') }}
        {%- endif %}
        {{- '[RESULT] {"content": ' + message.content + ', "id": "' + message.tool_call_id + '"}[/RESULT]' }}
    {%- endif %}
{%- endfor %}
"""

# The system text always moves to the last question.
MISTRAL_MOVES = MISTRAL_TOOLS.replace("if loop.last and system", "if loop.index0 >= rest | length - 2 and system")

# A turn goes on behind a tool's result, its text there too; and a prompt has a thought block that no conversation has.
CONTINUED = """
{%- set ns = namespace(after='') %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{%- set ns.after = 'tool' %}
    {%- else %}
        {%- if message.role != 'assistant' or ns.after != 'tool' %}
            {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + call.function.name + (call.function.arguments | tojson) + '</tool_call>' }}
        {%- endfor %}
        {%- if message.tool_calls %}
            {%- for later in messages[loop.index:] if later.role == 'tool' %}
                {{- '<result>' + later.content + '</result>' }}
            {%- endfor %}
        {%- endif %}
        {{- message.content }}{%- if message.content or not message.tool_calls %}{{- '<end_of_turn>\n' }}{%- endif %}
        {%- set ns.after = '' %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.after != 'tool' %}{{- '<start_of_turn>model\n<think>\n</think>' }}{%- endif %}
"""

# Reasoning of earlier turns is left out, under a key of its own; arguments are JSON text; one call a turn.
CHANNELS = """
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if message.tool_calls | length > 1 %}{{- raise_exception('one call') }}{%- endif %}
        {%- if message.thinking and loop.index0 > ns.last %}
            {{- '<|im_start|>assistant to=self\n' + message.thinking + '<|im_end|>' }}
        {%- endif %}
        {%- for call in message.tool_calls %}
            {{- '<|im_start|>assistant to=' + call.function.name + '\n' + call.function.arguments + '<|im_end|>' }}
        {%- endfor %}
        {%- if message.content %}{{- '<|im_start|>assistant to=user\n' + message.content }}
            {{- '<|endoftext|>' if loop.last else '<|im_end|>' }}
        {%- endif %}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>' + message.name + ' to=assistant\n' + message.content + '<|im_end|>' }}
    {%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant' }}{%- endif %}
"""

# Of parallel calls, only the first.
FIRST_CALL = CHANNELS.replace("{{- raise_exception('one call') }}", "").replace(
    "for call in message.tool_calls", "for call in (message.tool_calls or [])[:1]"
)

# A later turn with a call has no header, and a prompt has a thought block that no conversation has.
NO_HEADER = """
{%- set ns = namespace(called=false) %}
{%- for message in messages %}
    {%- if not message.tool_calls or not ns.called %}{{- '<|im_start|>' + message.role + '\n' }}{%- endif %}
    {%- for call in message.tool_calls or [] %}{%- set ns.called = true %}
        {{- '\n<tool_call>' + call.function.name + (call.function.arguments | tojson) + '</tool_call>' }}
    {%- endfor %}
    {{- message.content + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}
"""

# An end of the text behind the end of the last turn, with a line break before it.
END_OF_TEXT = (
    LLAMA3.replace("'<|eot_id|>' }}", "'<|eot_id|>\n' }}")
    + "{%- if not add_generation_prompt %}{{- '</s>' }}{% endif %}"
)

# Contents are lists of parts.
PARTS = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- for part in message.content if part.type == 'text' %}{{- part.text }}{%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

# Nothing tells where an answer begins: a prompt begins and ends otherwise than the conversation.
SHUFFLED = """
{%- for message in messages %}{{- '{' + message.content + '}' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'now:' }}{%- endif %}
"""

FAMILIES = {
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "generation": GENERATION,
}
