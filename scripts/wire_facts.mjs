// Facts about the answers of two providers, read from the TypeScript types of their SDKs: which fields are
// required, which may be left out, which may be null. TypeScript tells these apart; Python's types do not.
//
//   npm install --prefix FOLDER typescript@5 openai @anthropic-ai/sdk
//   node scripts/wire_facts.mjs FOLDER tests/support/wire
//
// Writes openai_types.json and anthropic_types.json: {"package": "name version", "types": {NAME: TYPE}}. A TYPE is
//   "string", "number", "boolean", "null", "any"    a primitive
//   "=text"                                        exactly this string (true, 1: exactly this value)
//   "#Name"                                        another type
//   [TYPE]                                         a list
//   {"map": TYPE}                                  an object with any keys
//   {"any": [TYPE, ...]}                           one of several
//   {"fields": {"name": TYPE, "name?": TYPE}}      an object; a question mark: the key may be absent

import { createRequire } from 'node:module';
import { readFileSync, writeFileSync } from 'node:fs';
import { join, resolve } from 'node:path';

const [folder, target] = process.argv.slice(2).map((path) => resolve(path));
const ts = createRequire(join(folder, 'package.json'))('typescript');
const ROOTS = {
  openai: {
    package: 'openai',
    files: {
      'resources/chat/completions/completions': [
        'ChatCompletion', 'ChatCompletionChunk', 'ChatCompletionStoreMessage', 'ChatCompletionDeleted',
      ],
      'resources/completions': ['Completion'],
      'resources/responses/responses': [
        'Response', 'ResponseStreamEvent', 'ResponseItem', 'CompactedResponse',
      ],
      'resources/responses/input-items': ['ResponseItemList'],
      'resources/responses/input-tokens': ['InputTokenCountResponse'],
      'resources/conversations/conversations': ['Conversation', 'ConversationDeletedResource'],
      'resources/conversations/items': ['ConversationItem', 'ConversationItemList'],
      'resources/models': ['Model'],
      'resources/shared': ['ErrorObject'],
    },
  },
  anthropic: {
    package: '@anthropic-ai/sdk',
    files: {
      'resources/messages/messages': ['Message', 'RawMessageStreamEvent', 'MessageTokensCount'],
      'resources/shared': ['ErrorResponse'],
    },
  },
};

class Reader {
  constructor(checker) {
    this.checker = checker;
    this.types = {};
    this.names = new Map(); // type id -> the name under which it is written
  }

  /** Returns the TYPE of a type; named object types are written once and referred to. */
  read(type) {
    const { checker } = this;
    const { TypeFlags } = ts;
    if (type.flags & (TypeFlags.Any | TypeFlags.Unknown)) return 'any';
    if (type.flags & TypeFlags.StringLiteral) return `=${type.value}`;
    if (type.flags & TypeFlags.NumberLiteral) return type.value;
    if (type.flags & TypeFlags.BooleanLiteral) return checker.typeToString(type) === 'true';
    if (type.flags & TypeFlags.StringLike) return 'string';
    if (type.flags & TypeFlags.NumberLike) return 'number';
    if (type.flags & TypeFlags.BooleanLike) return 'boolean';
    if (type.flags & TypeFlags.Null) return 'null';
    if (type.isUnion()) return this.union(type);
    if (checker.isArrayType(type)) return [this.read(checker.getTypeArguments(type)[0])];
    if (type.isIntersection() && type.types.some((member) => member.flags & TypeFlags.String)) return 'string';
    if (type.flags & TypeFlags.NonPrimitive) return { map: 'any' };
    return this.object(type);
  }

  union(type) {
    const members = type.types.filter((member) => !(member.flags & ts.TypeFlags.Undefined));
    const literals = members.filter((member) => member.flags & ts.TypeFlags.BooleanLiteral);
    let facts = members.filter((member) => !literals.includes(member)).map((member) => this.read(member));
    if (facts.includes('string')) facts = facts.filter((fact) => typeof fact !== 'string' || !fact.startsWith('='));
    if (literals.length === 2) facts.push('boolean');
    else facts.push(...literals.map((member) => this.read(member)));
    return facts.length === 1 ? facts[0] : { any: facts };
  }

  object(type) {
    const index = this.checker.getIndexInfoOfType(type, ts.IndexKind.String);
    const properties = this.checker.getPropertiesOfType(type);
    if (!properties.length) return { map: index ? this.read(index.type) : 'any' };
    if (this.names.has(type)) return `#${this.names.get(type)}`;
    const name = this.name(type);
    this.names.set(type, name);
    this.types[name] = { fields: {} };
    for (const property of properties) this.field(name, property);
    return `#${name}`;
  }

  field(owner, property) {
    const declared = property.valueDeclaration ?? property.declarations?.[0];
    const type = this.checker.getTypeOfSymbolAtLocation(property, declared);
    if (type.getCallSignatures().length) return;
    const optional = property.flags & ts.SymbolFlags.Optional;
    const key = property.name + (optional ? '?' : '');
    this.types[owner].fields[key] = this.read(optional ? this.checker.getNonOptionalType?.(type) ?? type : type);
  }

  /** Returns the declared name, qualified by its namespaces. */
  name(type) {
    const symbol = type.aliasSymbol ?? type.symbol;
    const full = !symbol ? 'Intersection' : this.checker.getFullyQualifiedName(symbol).replace(/^".*"\./, '');
    const base = full === '__type' ? 'Anonymous' : full;
    let name = base;
    for (let count = 2; name in this.types; count += 1) name = `${base}~${count}`;
    return name;
  }
}

function facts({ package: name, files }) {
  const root = join(folder, 'node_modules', name);
  const { version } = JSON.parse(readFileSync(join(root, 'package.json'), 'utf8'));
  const paths = Object.keys(files).map((file) => join(root, `${file}.d.ts`));
  const options = { strict: true, skipLibCheck: true, module: ts.ModuleKind.NodeNext };
  const program = ts.createProgram(paths, options);
  const checker = program.getTypeChecker();
  const reader = new Reader(checker);
  const roots = {};
  Object.values(files).forEach((wanted, position) => {
    const module = checker.getSymbolAtLocation(program.getSourceFile(paths[position]));
    const exported = new Map(checker.getExportsOfModule(module).map((symbol) => [symbol.name, symbol]));
    for (const each of wanted) {
      if (!exported.has(each)) throw new Error(`${name} ${version} has no ${each}`);
      roots[each] = reader.read(checker.getDeclaredTypeOfSymbol(exported.get(each)));
    }
  });
  return { package: `${name} ${version}`, roots, types: reader.types };
}

function write(path, found) {
  const lines = (entries) => Object.entries(entries).map(([name, fact]) => `  ${JSON.stringify(name)}: ${JSON.stringify(fact)}`);
  const types = lines(found.types).sort().join(',\n');
  const text = `{"package": ${JSON.stringify(found.package)},\n"roots": {\n${lines(found.roots).join(',\n')}\n},\n"types": {\n${types}\n}}\n`;
  writeFileSync(path, text);
}

for (const [name, wanted] of Object.entries(ROOTS)) write(join(target, `${name}_types.json`), facts(wanted));
